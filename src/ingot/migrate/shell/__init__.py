"""What a shell script would pass to the training program, found by reading it; nothing is ever executed.

`parser` turns text into commands (`syntax`), `values` holds what is known of a variable, `expand` turns words into
arguments, `evaluator` follows the commands, and `script` picks the one run and checks its arguments.
"""
