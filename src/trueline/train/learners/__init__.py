"""Jobs of scripts that Fabric for Deep Learning's manifests describe: learners that start together and end together."""
