"""The environments that pellucid brings along; `environment.BUILT_IN` lists them by id."""
