"""Sphinx configuration; built with warnings as errors by `.ci/run`."""

import os

os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")

import torchrl_generational

project = "torchrl-generational"
author = "The torchrl-generational developers"
copyright = f"2026, {author}"
release = version = torchrl_generational.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {version}"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
myst_heading_anchors = 3
# TorchRL's and torch's inventories are not reachable where this is built offline, so references to them stay text.
nitpicky = False
