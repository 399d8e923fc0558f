"""Downloads against a hub that runs on this machine."""
