"""A module for each kind of data; each has a `read(name, place, settings) -> Collection`."""
