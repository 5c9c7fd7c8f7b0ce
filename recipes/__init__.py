"""Recipes: algorithms as whole programs, `verl_mg.recipes` wherever they are imported."""

if __name__ != "verl_mg.recipes":
    # The folder is importable from a checkout too, and a module with two names would have two of each class.
    raise ImportError(f"{__name__}: import verl_mg.recipes instead")
