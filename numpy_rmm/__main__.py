"""``python -m numpy_rmm``: the same as the command ``numpy-rmm``."""

import sys

from numpy_rmm._cli import main

if __name__ == "__main__":
    sys.exit(main())
