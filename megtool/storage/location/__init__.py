"""Locations: local paths and URLs of object stores, and what stores said of their objects."""
