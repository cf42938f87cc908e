"""What the subcommands share: ranks, output, options, and the problems that they know by name."""
