"""`python -m litchi`, which is how torchrun and accelerate start a rank."""

from litchi.cli import main

main()
