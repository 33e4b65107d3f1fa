// Package identity says what makes two requests equal, and what makes two builds of one request different.
//
// Terms are what of a request decides what is compiled, as an application spelled it. A Record is the one spelling that all equal terms have: every
// option known and in its one form, defaults left out, devices found, files by their content. Its digest is the request key; that and what an
// execution provider is known by make the build key. Records stand in manifests, so a change of what one encodes to makes stored builds
// unreachable: samples in the tests hold it still.
//
// What nobody knows, or clients may not ask for, is refused with an *apierr.Error. Terms and records open nothing but
// the files of options.
//
// Models finds the digest of a model, by hashing its files or by what is remembered under their stamps. Sources
// remembers where a model's files are, and opens them again.
//
// Any number of goroutines may use all of it. Start reading at Terms.Record and Models.Identify.
package identity
