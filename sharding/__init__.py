"""Layouts of models over many devices. Knows logical axes, and no model."""

from sharding.axes import AXES
from sharding.errors import LayoutError
from sharding.layout import Layout
from sharding.mesh import abstract_mesh, initialize, make_mesh

__all__ = ["AXES", "Layout", "LayoutError", "abstract_mesh", "initialize", "make_mesh"]
