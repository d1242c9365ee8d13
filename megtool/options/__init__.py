"""The mechanism behind the verbs' options, and groups of options that several verbs share.

The options of each verb are in `megtool.commands.options`.
"""
