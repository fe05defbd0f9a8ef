from bench.pytorch_tests.run import main

raise SystemExit(main())
