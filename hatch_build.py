"""Puts conf/, kernels/ and profiles/ into the wheel under `mtrain_cli`.

In a hook, not as `force-include` in pyproject.toml, because that also fills editable installs: their site-packages would then hold a folder
`mtrain_cli` without code, which hides the checkout. An editable install finds the three folders in the checkout by itself.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Resources(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            build_data["force_include"].update(
                {name: f"mtrain_cli/{name}" for name in ("conf", "kernels", "profiles")}
            )
