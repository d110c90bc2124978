from covary.cli import main

main()
