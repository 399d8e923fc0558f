"""Programs for people who work on the tests."""
