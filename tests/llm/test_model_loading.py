"""`checkpoint=` on the command line of every script that takes one is a value, not a group of configs/."""

import re
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.loader import CONFIG_DIR, compose_config
from llm.chat import ChatConfig
from llm.evaluating import EvaluateConfig
from llm.generating import GenerateConfig
from llm.hf_export import HfExportConfig
from llm.model_loading import resolve_checkpoint
from llm.serve_config import ServeConfig

SCRIPTS = {
    "generating": GenerateConfig, "evaluating": EvaluateConfig, "serve": ServeConfig, "chat": ChatConfig,
    "hf_export": HfExportConfig,
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_checkpoint_is_named_on_the_command_line(name):
    more = ["output=x"] if name == "hf_export" else []
    assert (
        compose_config(SCRIPTS[name], name, ["checkpoint=runs/x/step_00000001", *more]).checkpoint
        == "runs/x/step_00000001"
    )


def test_no_group_of_configs_hides_a_setting():
    """Hydra takes `name=value` for the choice of a group's file wherever a folder has the setting's name."""
    groups = {path.name for path in Path(CONFIG_DIR).iterdir() if path.is_dir()}
    for path in Path(CONFIG_DIR).glob("*.yaml"):
        plain = re.findall(r"^(\w+): \S", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not groups & set(plain), f"{path.name}: {groups & set(plain)}"


@pytest.mark.parametrize("run, checkpoint", [(None, None), ("a", "b"), (None, "/nowhere"), ("/nowhere", None)])
def test_a_run_or_a_checkpoint_is_given(run, checkpoint):
    with pytest.raises(UserError):
        resolve_checkpoint(run, checkpoint)
