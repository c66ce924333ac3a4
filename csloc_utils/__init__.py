"""Find the few attention heads of a language model that carry a capability, and check them.

The road through the package: a model seen as heads (`heads`, `models`, `ablation`), a task with
its scores (`tasks`, `scoring`), random masks (`designs`), their measured effects (`measure`,
`store`), the heads recovered from them (`recovery`, `search`), and the check on items that did
not choose them (`verify`, `plots`). Importing this module is cheap: the parts load when asked for.
"""

from __future__ import annotations

import warnings

__version__ = "0.1.0"

# In a notebook kernel without ipywidgets, tqdm.auto warns on import, with the path of an installed
# file; nothing of ours needs widgets, and the path would be printed in the published pages.
warnings.filterwarnings("ignore", message="IProgress not found")
