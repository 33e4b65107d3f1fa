// Package weights finds the tensors of an ONNX model in what a compiler made of it, for people who want to know what a context binary
// consists of. Binaries of most execution providers name nothing that is in them; but weights stand in them as they are, or in one of
// few other forms, and those can be made of the model and looked for.
//
// What is found is there: every byte of it was compared, by a hash of 64 bits with a key of its own. What stands in a form that is not
// known here (quantised, folded into other tensors) is not found, and no guess is made. Of tensors with the same bytes one is named.
//
// Nothing here decides what is stored, or how.
package weights
