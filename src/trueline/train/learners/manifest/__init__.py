"""Manifests of Fabric for Deep Learning."""
