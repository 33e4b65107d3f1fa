// Package rules holds judgements as data: which builds suit which runtimes where neither the execution provider (EP) nor a fingerprint nor a load
// check can say it, and what ONNX Runtime's error codes mean for each EP.
//
// [Shipped] is what epcached knows of the vendors' EPs; [Load] reads an administrator's TOML files, and [Set.Over] puts them in front. [Set.Judge]
// compares what a build says of itself with what a runtime's probe says; [Set.Classify] tells whether an error that a client reports means a stale
// build. The format, and what is shipped, is described in doc/rules.md; the files in shipped/ say where each fact is from.
//
// What callers may rely on:
//
//   - A Set never changes, and may be used by several goroutines at once. The nil Set knows nothing: it judges all unknown.
//   - Files are strict. Parse and Load give either a whole Set or an error that names file, line, column, field and reason, of all mistakes
//     at once as far as TOML's syntax allows. They never panic, and sizes are bounded: files, rules, regular expressions.
//   - A fact that is not known, or a version that is none, never makes a condition hold. The reason of the judgement says so.
//
// Start reading at [Set.Judge]; condition.go has what a rule can ask for.
package rules
