"""The `entame` command."""
