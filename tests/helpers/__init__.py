"""Modules that tests of several packages share."""
