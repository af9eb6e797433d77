"""How Sphinx builds the documentation: `make docs`."""

import holdfast

project = "Holdfast"
author = "the Holdfast authors"
copyright = author
release = version = holdfast.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
myst_heading_anchors = 4

autodoc_mock_imports = ["accelerate", "lightning", "ray", "transformers"]  # in environments of their own
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
add_module_names = False

html_theme = "furo"
html_title = f"Holdfast {version}"
html_static_path = ["_static"]
html_css_files = ["holdfast.css"]
html_copy_source = False
html_show_sourcelink = False

# A prompt and the output below a command are not copied with it.
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
copybutton_line_continuation_character = "\\"

pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
