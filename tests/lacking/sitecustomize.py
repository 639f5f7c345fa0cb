"""On the path of a simulated node: the folder that LACKING names is not there.

That is so for imports and for files alike, as on a machine that never had it.
"""

import os
import sys

LACKING = os.environ["LACKING"]


def refuse(event, args):
    if event in ("open", "os.listdir") and isinstance(args[0], str) and args[0].startswith(LACKING):
        raise FileNotFoundError(2, "this node has no such file", args[0])


sys.addaudithook(refuse)
