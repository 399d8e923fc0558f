"""The program `ninfer`, also as `python -m ninfer_cli`: quiet when Ctrl-C comes while its modules are still loading."""

import signal


def main() -> None:
    """The entry point; never returns."""
    loading = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # otherwise the caller wants it ignored
    if loading:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .main import main as run

    if loading:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
