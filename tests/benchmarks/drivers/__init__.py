"""Programs that drive one system each. They run in an environment that has that system, and maybe not this project."""
