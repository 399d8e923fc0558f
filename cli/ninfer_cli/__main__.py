"""`python -m ninfer_cli`: the same program as `ninfer`."""

from .main import main

main()
