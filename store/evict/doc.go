// Package evict says what blobs take on the disk and who needs them, and plans what goes when there has to be room.
//
// It works on what was known of a store at one moment: an Inventory, which whoever has a store fills, of what index.Survey says and of the forms that
// blobs have besides. Of that it adds up what is whose (Inventory.ByModel, SumsBy), and a Snapshot's Plan takes builds out of it in thought, packs blobs and drops
// copies, until Limits are kept to. It opens no file, takes no lock, and knows no views or requests: whether a build may go now is asked
// of a function, and whoever carries a plan out looks again before each Step. An inventory belongs to one goroutine.
package evict
