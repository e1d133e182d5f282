"""A Django project whose tasks do nothing, for the systems that are Django apps."""
