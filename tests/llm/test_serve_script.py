"""The scripts as a user starts them: on a checkpoint, until a signal or the end of input, and with wrong settings."""

import io
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from configs.errors import UserError
from configs.loader import compose_config
from llm.args import TrainConfig
from llm.chat import ChatConfig, run_chat
from llm.serve import import_server, listen
from llm.serve_config import ServeConfig
from llm.serve_guard import hosts_of
from llm.training import train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tiny_run(tiny_corpus, tmp_path_factory) -> Path:
    """A run of a few steps, with its checkpoint."""
    runs = tmp_path_factory.mktemp("runs")
    train(compose_config(TrainConfig, "training", [*tiny_corpus.overrides(runs), "max_steps=2"]))
    return runs / "tiny"


def test_the_server_starts_answers_and_ends_at_a_signal(tiny_run, tmp_path):
    token = "correct-horse-battery-staple"
    (tmp_path / "token").write_text(f"{token}\n")
    overrides = [f"run={tiny_run}", "port=0", f"token_file={tmp_path / 'token'}", "device=cpu", "engine.max_running=2"]
    command = [sys.executable, "-m", "llm.serve", *overrides]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert url and "step_00000002" in line, line + process.stderr.read()
        with httpx.Client(base_url=url.group(), timeout=60, headers={"authorization": f"Bearer {token}"}) as http:
            assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["tiny"]
            answer = http.post("/v1/completions", json={"prompt": "the", "max_tokens": 3, "ignored": 1})
            assert answer.status_code == 400 and "ignored" in answer.text
            answer = http.post("/v1/completions", json={"prompt": "the", "max_tokens": 3})
            assert answer.json()["usage"]["completion_tokens"] >= 1
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode in (0, -signal.SIGTERM) and "Traceback" not in errors, errors
    finally:
        process.kill()
        process.wait()


def test_the_chat_answers_lines_of_standard_input(tiny_run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n/temperature x\n/settings\n"))
    run_chat(compose_config(ChatConfig, "chat", [f"run={tiny_run}", "device=cpu", "max_new_tokens=5"]))
    output = capsys.readouterr().out
    assert "plain form" in output and "is not a number" in output and "max_new_tokens 5" in output


WRONG_SETTINGS = {
    "host=0.0.0.0": "token_file=PATH",
    "port=70000": "0..65535",
    "limits.max_choices=0": "max_choices",
    "limits.max_waiting=-1": "max_waiting",
    "engine.max_running=0": "max_running",
    "limits.max_tokens=3": "max_tokens",
    "device=tpu": "device",
}


@pytest.mark.parametrize("override", WRONG_SETTINGS)
def test_wrong_settings_are_refused_in_a_line(override):
    with pytest.raises(UserError, match=re.escape(WRONG_SETTINGS[override])) as error:
        compose_config(ServeConfig, "serve", ["run=x", override])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "short", "two words of a token", "ключ-из-многих-букв"])
def test_a_token_file_that_cannot_serve_is_refused(tmp_path, content):
    (tmp_path / "token").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match="token_file"):
        ServeConfig(token_file=str(tmp_path / "token")).read_token()


def test_a_taken_port_is_known_before_the_model_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="choose another port"):
            listen("127.0.0.1", taken.getsockname()[1])


def test_names_that_the_host_header_may_hold():
    assert hosts_of("127.0.0.1", []) == {"localhost", "127.0.0.1", "::1"}
    assert "gpu-box" in hosts_of("0.0.0.0", ["GPU-box"])
    assert hosts_of("0.0.0.0", []) is None, "every address is listened on and nobody said by what name"


def test_without_the_extra_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"fastapi is not installed; run: pip install -e '\.\[serve\]'"):
        import_server()
