"""`python -m atas` is the command `atas`."""

from atas.cli import main

main()
