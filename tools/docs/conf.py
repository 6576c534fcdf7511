"""Sphinx's settings for the documentation. `tools/docs/build.py` passes them; see there for how the site is built."""

from ingot.version import __version__

project = "ingot"
author = "the ingot authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["docs/generated"]  # tables that pages include
root_doc = "docs/index"

myst_heading_anchors = 4  # links to headings, as on GitHub: page.md#a-heading
myst_links_external_new_tab = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True

html_theme = "furo"  # no web fonts, no CDN: the pages work without a network
html_title = f"ingot {__version__}"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"sidebar_hide_name": False}
