// Package atrest gives out the files of builds from a store at rest: one that no daemon has, such as that of a factory image. Nothing is written into
// the store, and nothing is believed: every file is hashed before it is given out, whether it lies in a view, whole, or packed.
//
// A Store knows the folder and no more. Which builds there are and whom they suit is for the caller to know, and also that no daemon has the store; one
// that starts meanwhile leaves alone what a View holds. Any number of goroutines, and of processes, may use it. Start reading at Store.View.
package atrest
