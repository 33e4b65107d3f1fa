// Package forms keeps the blobs of one store in the form that serves best for what it takes on the disk, and changes one form into another.
//
// A blob may be whole, packed, or both. Where it is whole, that form is served and the recipe waits for it to go; where it
// is only packed, it is rebuilt into a file of its own before anybody can be given it: the unpacked form, a copy, which is not
// synced and may vanish at any time. The blobs that recipes take bytes from are containers: they are whole, and stay
// while a recipe needs them, whether anybody else does or not. Recipes have depth one.
//
// Package cas keeps the whole forms and the copies, package dedupe the recipes; this one knows what each blob has, and in which order forms
// come and go, so that there is one that serves it at any time, also after a crash. It knows digests, files, stamps and
// room, and nothing of what blobs are kept for: who knows that is its Owner, which it asks before anything goes, or takes bytes
// of something else. What has been found out of blobs lies in its Memory.
//
// A Store may be used by any number of goroutines. What changes the form of a blob takes the store's turn, so one
// blob is changed at a time; who opens, verifies or copies blobs waits for nobody. What is said to be packed, whole or removed is so durably,
// but for copies. Start with Store.Pack (pack.go) and Store.Unpack (unpack.go).
package forms
