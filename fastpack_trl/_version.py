__version__ = "0.1.0"
REPOSITORY = "https://github.com/OWNER/fastpack-trl"  # the address until there is one; pyproject.toml has it too
