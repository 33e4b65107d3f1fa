package main

// refusedHere are calls that only this architecture has: none.
var refusedHere []denial
