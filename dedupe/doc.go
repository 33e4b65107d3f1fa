// Package dedupe keeps the recipes of packed blobs, and applies them byte for
// byte. Package match finds what blobs share.
//
// A Recipe rebuilds a packed blob from extents: ranges of other blobs, its containers, which stand
// whole in the store. What stands nowhere else is a container too, the recipe's own literals, which
// later recipes may use directly. Recipes have depth one: what a recipe refers to is never itself
// packed. A short run that is repeated, such as zeros, is one extent with a period. Or a recipe has
// its own literals in its own file, compressed, for itself alone (Frames). doc/format.md has the
// bytes of a recipe.
//
// Recipes that are read are foreign bytes: DecodeRecipe accepts only what is sound in itself, and
// Apply hashes what comes out, so a wrong extent or a wrong container can cost a compile but never
// gives a wrong artefact. With ApplyOptions.Trusted, which is for containers with valid stamps,
// nothing is hashed.
//
// All functions may be called at the same time, also with the same Recipe,
// which nothing here changes. Start with Recipe, Apply and Shelf.
package dedupe
