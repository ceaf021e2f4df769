"""A layout: mesh axes, rules logical axis -> mesh axes, and strategies; read from yaml."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sharding import layout_rules
from sharding.axes import AXES
from sharding.errors import LayoutError


@dataclass(frozen=True, eq=False)
class Layout:
    """How arrays and work are spread over devices; equal to a layout that says the same.

    Attributes:
      why: the reason this layout exists, in two lines.
      chip: one of `layout_rules.CHIPS`.
      mesh: mesh axis -> size, outermost first.
      rules: logical axis -> the mesh axes that split it, for every axis of `AXES`.
      dispatch: {"prefill": s, "decode": s}, s one of "ragged", "dense", "gather": how tokens reach
        their experts.
      topology: of one slice, as "v5p:4x4x4"; None for any.
      slices: the first mesh axis spans them.
      extra_experts: slots for copies of busy experts, beyond the model's own experts.
    Raises:
      LayoutError: everything that is wrong with it.
    """

    name: str
    why: str
    chip: str
    mesh: Mapping[str, int]
    rules: Mapping[str, tuple[str, ...]]
    dispatch: Mapping[str, str]
    topology: str | None = None
    slices: int = 1
    extra_experts: int = 0
    _key: str = field(init=False, repr=False)

    def __post_init__(self):
        written = self.to_dict()
        _refuse(self.name, layout_rules.problems(written))
        for part in ("rules", "dispatch"):
            written[part] = sorted(written[part].items())
        written["replicated"].sort()
        # Text, because dictionaries have no hash and are equal in any order; a mesh has an order.
        object.__setattr__(self, "_key", str(sorted(written.items(), key=lambda item: item[0])))

    def __eq__(self, other):
        return isinstance(other, Layout) and self._key == other._key

    def __hash__(self):
        return hash(self._key)

    @classmethod
    def load(cls, path_or_name: str | Path) -> Layout:
        """A yaml file, or a layout shipped under that name; without a ``name`` the file's counts.

        Raises:
          LayoutError: no such file, not a yaml mapping, or everything wrong with the layout.
        """
        shipped = _shipped()
        path = shipped.get(str(path_or_name)) or Path(path_or_name).expanduser()
        if not path.is_file():
            names = ", ".join(shipped)
            raise LayoutError(
                str(path_or_name), [f"no such file, and no shipped layout; there are {names}"]
            )
        try:
            written = yaml.load(path.read_text(encoding="utf-8"), _Loader)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise LayoutError(str(path), [f"not yaml: {' '.join(str(error).split())}"]) from None
        if written is None:
            raise LayoutError(str(path), ["the file is empty"])
        if not isinstance(written, Mapping):
            raise LayoutError(str(path), [f"a {type(written).__name__}, must be a mapping"])
        return cls.from_dict({"name": path.stem, **written})

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Layout:
        """From what a yaml file says, with ``name``. Raises LayoutError as `load`."""
        _refuse(d.get("name"), layout_rules.problems(d))
        rules = {name: tuple(d["rules"].get(name, ())) for name in AXES}
        rest = {k: v for k, v in d.items() if k not in ("rules", "replicated", "mesh", "dispatch")}
        dispatch = {phase: d["dispatch"][phase] for phase in layout_rules.PHASES}
        return cls(**rest, mesh=dict(d["mesh"]), rules=rules, dispatch=dispatch)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and dictionaries; ``from_dict(l.to_dict()) == l``.

        The mesh has an order: write it with ``yaml.safe_dump(d, sort_keys=False)``.
        """
        return {
            "name": self.name,
            "why": self.why,
            "chip": self.chip,
            "topology": self.topology,
            "slices": self.slices,
            "mesh": dict(self.mesh),
            "rules": {name: list(axes) for name, axes in self.rules.items() if axes},
            "replicated": [name for name, axes in self.rules.items() if not axes],
            "dispatch": dict(self.dispatch),
            "extra_experts": self.extra_experts,
        }

    @staticmethod
    def shipped() -> tuple[str, ...]:
        """Names of the layouts that come with the package."""
        return tuple(_shipped())

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh.values())

    def size(self, axes: Iterable[str]) -> int:
        """Product of the sizes of mesh axes; 1 for none."""
        return math.prod(self.mesh[a] for a in axes)

    def over(self, logical: str) -> tuple[str, ...]:
        """Mesh axes of more than one device that split a logical axis.

        Raises:
          LayoutError: a logical axis outside the vocabulary.
        """
        if logical not in self.rules:
            raise LayoutError(f"layout {self.name}", [f"unknown logical axis {logical!r}"])
        return tuple(a for a in self.rules[logical] if self.mesh[a] > 1)

    @property
    def batch(self) -> tuple[str, ...]:
        """Mesh axes that split the sequences."""
        return self.over("batch")

    @property
    def tensor(self) -> tuple[str, ...]:
        """Mesh axes that split heads, MLP columns and vocabulary, and that tokens are owned on."""
        return self.over("heads")

    @property
    def experts(self) -> tuple[str, ...]:
        """Mesh axes that split the routed experts."""
        return self.over("experts")

    @property
    def cache_sequence(self) -> tuple[str, ...]:
        """Mesh axes over which the rows of latent and index-key caches are striped."""
        return self.over("cache_sequence")

    def explain(self, tree: Any) -> str:
        """`sharding.resolve.explain` of the arrays of a tree that carry ``axes``."""
        from sharding import resolve

        return resolve.explain(self, resolve.named(tree))


def _refuse(name: Any, problems: list[str]):
    if problems:
        raise LayoutError(f"layout {name}", problems)


def _shipped() -> dict[str, Path]:
    """Name -> file: in a wheel beside this module, in a clone under configs."""
    here = Path(__file__).resolve().parent
    for root in (here / "layouts", here.parent / "configs" / "layouts"):
        if root.is_dir():
            return {path.stem: path for path in sorted(root.glob("*.yaml"))}
    return {}


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, where yaml would keep the last."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"key {key.value!r} stands twice, again in line {line}")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)
