"""Slow, independent implementations to compare with."""
