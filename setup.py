"""Packages the recipes, which lie beside the package in a checkout, inside it: the wheel carries them as rlcli/recipes."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["rlcli", "rlcli.*"]), "rlcli.recipes"],
    package_dir={"rlcli.recipes": "recipes"},
    package_data={"rlcli": ["py.typed"], "rlcli.recipes": ["*/*.yaml"]},
)
