"""The job around a recipe: it builds the roles, runs the iterations, and writes down what happens."""
