"""What a program should cost, before it runs: closed forms to hold the record against."""
