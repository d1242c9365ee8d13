"""The pages of reports (`--report`): one function per verb, from its report to a `Page`."""
