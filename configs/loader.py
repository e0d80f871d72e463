"""From Hydra's composed config to typed dataclasses, and from a user's mistake to one line and exit code 2.

Hydra only composes files and command-line overrides. `load_config` merges the result into a structured schema,
so that an unknown key or a wrong type fails at start, and hands back plain dataclasses: no DictConfig goes
further. Schemas check their own values in `__post_init__`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.errors import UserError
from configs.loader_errors import config_error

CONFIG_DIR = str(Path(__file__).resolve().parent)
Config = TypeVar("Config")


def load_config(schema: type[Config], composed: DictConfig | dict[str, Any]) -> Config:
    """Merge a composed config into the dataclass `schema` and return an instance of it.

    Raises UserError for an unknown key, a wrong type, a missing value, or a value that the schema refuses.
    """
    try:
        # Plain values again: a node that Hydra typed by itself would carry a stray key through the merge.
        plain = OmegaConf.to_container(composed) if isinstance(composed, DictConfig) else composed
        merged = OmegaConf.merge(OmegaConf.structured(schema), plain)
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise config_error(error, schema, []) from error


def register_schema(schema: type, config_name: str) -> None:
    """Make `schema` known to Hydra as "<config_name>_schema", the first entry of that file's defaults.

    Hydra then knows every field, also those that no YAML file sets, so `model.qk_norm=true` works as it stands and a
    misspelt key is refused.
    """
    ConfigStore.instance().store(name=f"{config_name}_schema", node=schema)


def run_script(body: Callable[[Config], Any], schema: type[Config], composed: DictConfig) -> None:
    """Load the config and run a script's body; what stops it is one line: exit code 2 a UserError, 130 Ctrl-C."""
    with exit_in_one_line():
        body(load_config(schema, composed))


@contextmanager
def exit_in_one_line() -> Iterator[None]:
    """Turn a UserError and Ctrl-C into a line on stderr and exit codes 2 and 130; every other exception passes."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped by Ctrl-C; what was saved until here stays", file=sys.stderr)
        sys.exit(130)


def start_script(main: Callable[[DictConfig], None], schema: type[Config], config_name: str) -> None:
    """Run `main`, a function under @hydra.main, on the command line's overrides, which are composed here.

    Hydra by itself answers a wrong override with a page and exit code 1; here it is one line and exit code 2. Where
    the command line holds an option (--cfg job, --help, --multirun), Hydra's own main takes over, in its own words:
    HYDRA_FULL_ERROR=1 and --run show where in a config an error comes from.
    """
    register_schema(schema, config_name)
    overrides = sys.argv[1:]
    if any(text.startswith("-") for text in overrides):
        main()
        return
    with exit_in_one_line():
        composed = compose_overrides(schema, config_name, overrides)
    main(composed)


def config_to_yaml(config: Any) -> str:
    """The YAML text of a config dataclass, as written to runs/<name>/config.yaml."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)


def compose_overrides(schema: type, config_name: str, overrides: list[str]) -> DictConfig:
    """Compose configs/<config_name>.yaml with overrides; UserError for what Hydra refuses."""
    with initialize_config_dir(version_base="1.3", config_dir=CONFIG_DIR):
        try:
            return compose(config_name=config_name, overrides=overrides)
        except HydraException as error:
            raise config_error(error, schema, overrides) from error


def compose_config(schema: type[Config], config_name: str, overrides: list[str] | None = None) -> Config:
    """Compose configs/<config_name>.yaml with overrides without a command line: for tests, benchmarks, notebooks."""
    register_schema(schema, config_name)
    return load_config(schema, compose_overrides(schema, config_name, overrides or []))
