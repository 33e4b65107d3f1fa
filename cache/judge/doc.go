// Package judge says how a build suits a runtime: whether it is optimal, works, or does not load
// there, and how that is known.
//
// The sources, from best to worst, are an equal library, the execution provider's own verdict, an
// equal fingerprint, a load check, and the rules of package rules. Nothing here loads a build: the
// caller does where that could change a judgement (see Check). Verdicts are remembered for exactly
// the libraries that they were given for, under the rules in force.
//
// Start reading at Judge.
package judge
