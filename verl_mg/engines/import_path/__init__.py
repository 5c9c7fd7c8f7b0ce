"""Folder on the import path of engines' processes, which contains nothing but this package under its name.

It stands for the folder that really has this package: that may be the `site-packages` of the trainer, or a checkout.
"""
