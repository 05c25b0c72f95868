"""Races strategies against each other on the same emulated cluster, model, data and seed."""
