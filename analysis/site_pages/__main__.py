"""`PYTHONPATH=analysis python -m site_pages FOLDER`: build the site into FOLDER (default build/site)."""

from __future__ import annotations

import sys
from pathlib import Path

from site_pages.build import build_site

build_site(Path(sys.argv[1] if len(sys.argv) > 1 else "build/site").absolute())
