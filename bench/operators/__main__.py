from bench.operators.run import main

raise SystemExit(main())
