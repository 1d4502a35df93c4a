"""Makes the packages named in HIDDEN_PACKAGES look as if they were not installed.

Python imports a module of this name when it starts. The folder stands on PYTHONPATH, so this reaches every process
that a test starts.
"""

import os
from importlib.machinery import PathFinder

find = PathFinder.find_spec


def find_spec(cls, name, path=None, target=None):
    hidden = os.environ.get("HIDDEN_PACKAGES", "").split()
    return None if name.partition(".")[0] in hidden else find(name, path, target)


PathFinder.find_spec = classmethod(find_spec)
