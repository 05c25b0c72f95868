"""Starts ranks, and finds out where a rank is."""
