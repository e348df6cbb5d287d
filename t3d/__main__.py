"""`python -m t3d` is `t3d`."""

from t3d.cli import main

main()
