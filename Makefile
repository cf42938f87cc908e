# `make demo` and `make test` do all set-up from nothing into .venv. See README.md.
