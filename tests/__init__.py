"""The tests: one folder a room of the package. Models of their own come from `tests.replicas`."""
